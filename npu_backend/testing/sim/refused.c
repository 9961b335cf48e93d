/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything torch_npu 2.5.1 ... 2.14.0 links against that is not simulated. Each call returns the
 * runtime's "API not supported" (or NULL where a handle is asked for) and leaves its name for
 * aclGetRecentErrMsg, so that what is missing fails loudly and by name.
 */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>

#define REFUSED(name)                 \
    EXPORT status name(void)          \
    {                                 \
        return standin_refuse(#name); \
    }

#define REFUSED_HANDLE(name)   \
    EXPORT void *name(void)    \
    {                          \
        standin_refuse(#name); \
        return NULL;           \
    }

#define NOTHING(name)         \
    EXPORT status name(void)  \
    {                         \
        return OK;            \
    }

/* Constructors and void members of C++ classes cannot report an error: they end the process. */
#define FATAL(name)                                                                         \
    EXPORT void name(void)                                                                  \
    {                                                                                       \
        fputs("npu_backend.testing.sim: " #name                                             \
              " is not simulated (operators are never built as graph nodes here)\n",        \
              stderr);                                                                      \
        abort();                                                                            \
    }

/* clang-format off */

/* collective communication */
REFUSED(HcclAllGather)
REFUSED(HcclAllReduce)
REFUSED(HcclBroadcast)
REFUSED(HcclCommInitAll)
REFUSED(HcclCommInitRootInfo)
REFUSED(HcclGetRootInfo)
REFUSED(HcclRecv)
REFUSED(HcclReduceScatter)
REFUSED(HcclSend)

/* profiling reports */
REFUSED_HANDLE(MsprofGetHashId)
REFUSED(MsprofReportAdditionalInfo)
REFUSED(MsprofReportApi)
REFUSED(MsprofReportCompactInfo)

/* compiled operators: compute comes from kernels registered with torch, never from here */
REFUSED_HANDLE(aclCreateDataBuffer)
REFUSED_HANDLE(aclCreateTensorDesc)
REFUSED_HANDLE(aclopCreateAttr)
REFUSED(aclGetTensorDescDimV2)
REFUSED(aclGetTensorDescFormat)
REFUSED_HANDLE(aclGetTensorDescNumDims)
REFUSED(aclGetTensorDescType)
REFUSED(aclSetTensorDescName)
REFUSED(aclSetTensorFormat)
REFUSED(aclSetTensorPlaceMent)
REFUSED(aclSetTensorShape)
REFUSED(aclopCompileAndExecute)
REFUSED(aclopSetAttrBool)
REFUSED(aclopSetAttrDataType)
REFUSED(aclopSetAttrFloat)
REFUSED(aclopSetAttrInt)
REFUSED(aclopSetAttrListBool)
REFUSED(aclopSetAttrListFloat)
REFUSED(aclopSetAttrListInt)
REFUSED(aclopSetAttrListListInt)
REFUSED(aclopSetAttrString)

/* hardware figures, dumps, kernel binaries, memory shared between processes, event times */
REFUSED(aclGetDeviceCapability)
REFUSED(aclmdlFinalizeDump)
REFUSED(aclmdlInitDump)
REFUSED(aclmdlSetDump)
REFUSED(aclrtBinaryGetFunction)
REFUSED(aclrtBinaryLoadFromData)
REFUSED(aclrtDeviceGetBareTgid)
REFUSED(aclrtEventElapsedTime)
REFUSED(aclrtGetFunctionAddr)
REFUSED(aclrtMemExportToShareableHandle)
REFUSED(aclrtMemImportFromShareableHandle)
REFUSED(aclrtMemSetPidToShareableHandle)
REFUSED(aclrtProcessReport)
REFUSED(rtDevBinaryRegister)
REFUSED(rtFunctionRegister)
REFUSED(rtGetC2cCtrlAddr)
REFUSED(rtKernelLaunch)

/* Ascend Transformer Boost */
REFUSED(_ZN3atb13CreateContextEPPNS_7ContextE)
REFUSED(_ZN3atb15CreateOperationINS_5infer11LinearParamEEEiRKT_PPNS_9OperationE)
REFUSED(_ZN3atb15CreateOperationINS_5infer12ElewiseParamEEEiRKT_PPNS_9OperationE)
REFUSED(_ZN3atb15CreateOperationINS_5infer12RmsNormParamEEEiRKT_PPNS_9OperationE)
REFUSED(_ZN3atb15CreateOperationINS_5infer14GroupTopkParamEEEiRKT_PPNS_9OperationE)
REFUSED(_ZN3atb15CreateOperationINS_5infer18SelfAttentionParamEEEiRKT_PPNS_9OperationE)
REFUSED(_ZN3atb15CreateOperationINS_5infer19PagedAttentionParamEEEiRKT_PPNS_9OperationE)
REFUSED(_ZN3atb15CreateOperationINS_5infer20ReshapeAndCacheParamEEEiRKT_PPNS_9OperationE)
REFUSED(_ZN3atb15CreateOperationINS_5infer9RopeParamEEEiRKT_PPNS_9OperationE)
REFUSED_HANDLE(_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE)

/* Nothing is ever made, so nothing is left to destroy; an error here would end the process,
 * because torch_npu destroys from destructors. */
NOTHING(HcclCommDestroy)
NOTHING(aclDestroyDataBuffer)
NOTHING(aclDestroyTensorDesc)
NOTHING(aclopDestroyAttr)
NOTHING(_ZN3atb14DestroyContextEPNS_7ContextE)
NOTHING(_ZN3atb16DestroyOperationEPNS_9OperationE)

/* graph engine nodes */
FATAL(_ZN2ge8OperatorC2EPKcS2_)
FATAL(_ZN2ge8OperatorC2ERKNS_12AscendStringES3_)
FATAL(_ZN2ge8Operator12AttrRegisterEPKcb)
FATAL(_ZN2ge8Operator12AttrRegisterEPKcl)
FATAL(_ZN2ge8Operator13InputRegisterEPKc)
FATAL(_ZN2ge8Operator14OutputRegisterEPKc)
FATAL(_ZN2ge8Operator20DynamicInputRegisterEPKcjb)
FATAL(_ZN2ge8Operator20RequiredAttrRegisterEPKc)
FATAL(_ZN2ge8Operator27DynamicInputRegisterByIndexEPKcjm)

/* clang-format on */

/* These two run in static constructors of torch_npu's libraries. Registering a creator that nobody
 * will call needs no state; a string object holds one null shared pointer (two words). */
EXPORT void _ZN2ge23OperatorCreatorRegisterC1EPKcRKSt8functionIFNS_8OperatorERKNS_12AscendStringEEE(
    void)
{
}

EXPORT void _ZN2ge12AscendStringC1EPKc(void *self, const char *text)
{
    (void)text;
    ((void **)self)[0] = NULL;
    ((void **)self)[1] = NULL;
}
